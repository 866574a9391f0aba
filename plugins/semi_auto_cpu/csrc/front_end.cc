// The pass that ends MindSpore's front end for Ascend: from here on the graph is one for CPU.
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "host.h"
#include "inlining.h"
#include "kernel.h"
#include "mindspore/include/custom_pass_api.h"
#include "replacement.h"
#include "text.h"

namespace tc3 {
namespace {
using mindspore::CNodePtr;
using mindspore::FuncGraphManagerPtr;
using mindspore::FuncGraphPtr;

// Forward identities that only say what the gradient does; by now the gradient is in the graph.
const std::set<std::string> kMarkers{"_MirrorOperator",   "_MirrorMiniStepOperator", "_MirrorMicroStepOperator",
                                     "_VirtualDiv",       "_VirtualAdd",             "_VirtualPipelineEnd",
                                     "_VirtualAccuGrad",  "_VirtualDataset",         "_VirtualOutput"};

mindspore::PrimitivePtr Operator(const CNodePtr &node) {
  return mindspore::GetValueNode<mindspore::PrimitivePtr>(node->input(0));
}

std::vector<CNodePtr> Operators(const FuncGraphManagerPtr &manager) {
  std::vector<CNodePtr> found;
  for (const auto &node : manager->all_nodes()) {
    const auto cnode = node->cast<CNodePtr>();
    if (cnode != nullptr && Operator(cnode) != nullptr) found.push_back(cnode);
  }
  return found;
}

// Nodes and operators remember the target that they were made for.
void ForgetTargets(const FuncGraphManagerPtr &manager) {
  for (const auto &node : manager->all_nodes()) {
    if (node->has_user_data("primitive_target")) node->set_user_data<std::string>("primitive_target", nullptr);
  }
  for (const auto &node : Operators(manager)) {
    const auto target = Operator(node)->GetAttr("primitive_target");
    if (target != nullptr && target->ToString() == "Ascend") Operator(node)->DelAttr("primitive_target");
  }
}

// With the marks of @lazy_inline the backend would expect Ascend's way of expanding calls.
void ForgetLazyInline(const FuncGraphManagerPtr &manager) {
  mindspore::MsContext::GetInstance()->SetCellReuseLevel(mindspore::CellReuseLevel::kNoCellReuse);
  for (const auto &graph : manager->func_graphs()) {
    for (const char *flag : {"cell_reuse", "no_inline", "cell_lazy_inline_order"}) {
      if (graph->has_flag(flag)) graph->erase_flag(flag);
    }
  }
}

void ReplaceOperators(const FuncGraphManagerPtr &manager) {
  for (const auto &node : Operators(manager)) {
    const auto &name = Operator(node)->name();
    if (kMarkers.count(name) > 0) {
      (void)manager->Replace(node, node->input(1));
    } else if (IsReplaced(node)) {
      (void)manager->Replace(node, TakesUnknownNumbers(node) ? Widened(node) : Replaced(node));
    }
  }
}

// What only arranges memory (Reshape), the graph (Depend, MakeTuple) or its control flow needs no kernel; of
// StopGradient the backend leaves nothing.
bool NeedsKernel(const CNodePtr &node) {
  if (!mindspore::AnfUtils::IsRealKernel(node) || mindspore::common::AnfAlgo::IsNopNode(node)) return false;
  const auto &name = Operator(node)->name();
  return name != "Switch" && name != "StopGradient";
}

// What nothing here can compute of a node: "name", or "name of BFloat16" where only a type is not taken; "" if nothing.
std::string Lack(const CNodePtr &node) {
  const auto &name = Operator(node)->name();
  if (!NeedsKernel(node)) return "";
  if (!CanCompute(name)) return name;
  for (const auto type : InputTypes(node)) {
    if (!TakesType(name, type)) return name + " of " + mindspore::TypeIdToString(type);
  }
  return "";
}

// {"name": nodes, ...}
std::string Missing(const FuncGraphManagerPtr &manager) {
  std::map<std::string, size_t> counts;
  for (const auto &node : Operators(manager)) {
    if (const auto lack = Lack(node); !lack.empty()) ++counts[lack];
  }
  std::string out;
  for (const auto &[name, count] : counts) out += (out.empty() ? "" : ",") + Quoted(name) + ":" + std::to_string(count);
  return "{" + out + "}";
}

class FrontEndDone : public mindspore::opt::Pass {
 public:
  FrontEndDone() : Pass("tc3_front_end_done") {}

  bool Run(const FuncGraphPtr &graph) override {
    CallHost("{\"event\":\"front_end_done\"}");  // Python sets the target back to CPU
    auto manager = graph->manager();
    if (manager == nullptr) manager = mindspore::MakeManager({graph});
    InlineCalls(graph, manager);
    ForgetLazyInline(manager);
    ForgetTargets(manager);
    OrderCollectives(graph, manager);
    ReplaceOperators(manager);
    CallHost("{\"event\":\"missing\",\"nodes\":" + Missing(manager) + "}");
    return true;
  }
};

class Plugin : public mindspore::opt::CustomPassPlugin {
 public:
  std::string GetPluginName() const override { return "tc3_semi_auto_cpu"; }
  std::vector<std::string> GetAvailablePassNames() const override { return {"tc3_front_end_done"}; }
  std::shared_ptr<mindspore::opt::Pass> CreatePass(const std::string &) const override {
    return std::make_shared<FrontEndDone>();
  }
};
}  // namespace
}  // namespace tc3

EXPORT_CUSTOM_PASS_PLUGIN(tc3::Plugin)
