// AssignAdd(accumulator, Reshape(GroupedMatmul(TransposeExtView(x), gradient))) as one InplaceGroupedMatmulAdd.
//
// MindSpore's own grouped_matmul_assignadd_fusion does the same without the Reshape, which MindFormers' experts have
// because their weights are of two dimensions; the operator takes an accumulator of two dimensions, too.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mindspore/include/custom_pass_api.h"
#include "ops/op_def.h"

namespace tc3 {
namespace {
using mindspore::AnfNodePtr;
using mindspore::CNodePtr;
using mindspore::FuncGraphManagerPtr;
using mindspore::FuncGraphPtr;
using mindspore::TypeId;

constexpr char kWords[] = "plugins.grouped_gradient: ";
// inputs of GroupedMatmul: 1 is x, 2 the other factor, 3 to 7 what is not used here
constexpr size_t kFirstUnused = 3, kLastUnused = 7, kGroupList = 8, kSplitItem = 9, kGroupType = 10, kTransposeB = 12;
constexpr int64_t kOneOutput = 3, kInner = 2;
constexpr int64_t kAccumulator = 3;  // of InplaceGroupedMatmulAdd(x, weight, group_list, out)

std::string NameOf(const AnfNodePtr &node) {
  const auto cnode = node == nullptr ? nullptr : node->cast<CNodePtr>();
  const auto primitive = cnode == nullptr ? nullptr : mindspore::GetValueNode<mindspore::PrimitivePtr>(cnode->input(0));
  return primitive == nullptr ? "" : primitive->name();
}

CNodePtr Operator(const AnfNodePtr &node, const std::string &name) {
  return NameOf(node) == name ? node->cast<CNodePtr>() : nullptr;
}

template <typename T>
std::optional<T> Constant(const AnfNodePtr &node) {
  const auto value = node->isa<mindspore::ValueNode>() ? node->cast<mindspore::ValueNodePtr>()->value() : nullptr;
  if (value == nullptr || !value->isa<mindspore::Scalar>()) return std::nullopt;
  return mindspore::GetValue<T>(value);
}

bool IsNone(const AnfNodePtr &node) {
  return node->isa<mindspore::ValueNode>() && node->cast<mindspore::ValueNodePtr>()->value()->isa<mindspore::None>();
}

TypeId TypeOf(const AnfNodePtr &node) {
  const auto tensor = node->abstract() == nullptr ? nullptr : node->abstract()->cast<mindspore::abstract::AbstractTensorPtr>();
  return tensor == nullptr ? mindspore::kTypeUnknown : tensor->element()->BuildType()->type_id();
}

bool IsLow(TypeId type) { return type == mindspore::kNumberTypeBFloat16 || type == mindspore::kNumberTypeFloat16; }

// A GroupedMatmul that sums over the rows of each group: the gradient of grouped weights.
bool IsWeightGradient(const CNodePtr &node) {
  return node->size() > kTransposeB && Constant<int64_t>(node->input(kSplitItem)) == kOneOutput &&
         Constant<int64_t>(node->input(kGroupType)) == kInner;
}

// The one tensor of MakeTuple(tensor).
AnfNodePtr Only(const AnfNodePtr &node) {
  const auto tuple = Operator(node, "MakeTuple");
  return tuple != nullptr && tuple->size() == 2 ? tuple->input(1) : nullptr;
}

// x of TransposeExtView(x, -1, -2), in either order.
AnfNodePtr Untransposed(const AnfNodePtr &node) {
  const auto view = Operator(node, "TransposeExtView");
  if (view == nullptr) return nullptr;
  const auto a = Constant<int64_t>(view->input(2)), b = Constant<int64_t>(view->input(3));
  return a && b && *a < 0 && *b < 0 && *a + *b == -3 ? view->input(1) : nullptr;
}

// What takes a node's value, without what only waits for it (Depend's second input, which `waiting` gets).
size_t Users(const FuncGraphManagerPtr &manager, const AnfNodePtr &node, std::vector<CNodePtr> *waiting) {
  size_t users = 0;
  for (const auto &[user, index] : manager->node_users()[node]) {
    if (NameOf(user) == "UpdateState") continue;
    if (NameOf(user) == "Depend" && index == 2) {
      waiting->push_back(user->cast<CNodePtr>());
    } else {
      ++users;
    }
  }
  return users;
}

// InplaceGroupedMatmulAdd as MindSpore describes it: its last input is written, and its result is that input. So whoever
// reads the accumulator later waits for it, and the result takes no memory of its own.
mindspore::PrimitivePtr Operation() {
  constexpr char kName[] = "InplaceGroupedMatmulAdd";
  const auto known = mindspore::ops::GetOpDef(kName);
  if (known == nullptr || known->returns_.size() != 1 || known->returns_[0].inplace_input_index_ != kAccumulator) {
    return nullptr;
  }
  const auto primitive = std::make_shared<mindspore::Primitive>(kName, true, mindspore::kPrimTypeBuiltIn, true);
  primitive->set_signatures(known->signatures_);
  return primitive;
}

// What stands in the way of one AssignAdd(accumulator, Reshape(TupleGetItem(GroupedMatmul))); "" where it was replaced.
std::string Fuse(const FuncGraphManagerPtr &manager, const CNodePtr &add, const std::vector<CNodePtr> &way) {
  const auto &product = way.back();
  for (size_t i = kFirstUnused; i <= kLastUnused; ++i) {
    if (!IsNone(product->input(i))) return "a GroupedMatmul with biases or scales";
  }
  if (Constant<bool>(product->input(kTransposeB - 1)) != false || Constant<bool>(product->input(kTransposeB)) != false) {
    return "a GroupedMatmul that transposes by itself";
  }
  const auto rows = Only(product->input(1)), gradient = Only(product->input(2));
  const auto x = rows == nullptr ? nullptr : Untransposed(rows);
  if (x == nullptr || gradient == nullptr) return "a GroupedMatmul of other inputs than one transposed view";
  const auto &group_list = product->input(kGroupList), &accumulator = add->input(1);
  if (!IsLow(TypeOf(x)) || TypeOf(gradient) != TypeOf(x)) return "rows that are not bfloat16 or float16";
  if (TypeOf(group_list) != mindspore::kNumberTypeInt64) return "a group_list that is not int64";
  if (TypeOf(accumulator) != mindspore::kNumberTypeFloat32) return "an accumulator that is not float32";
  std::vector<CNodePtr> waiting;
  for (const auto &node : way) {
    if (Users(manager, node, &waiting) != 1) return "another user of " + NameOf(node);
  }
  const auto primitive = Operation();
  if (primitive == nullptr) return "a MindSpore whose InplaceGroupedMatmulAdd does not write its last input";
  primitive->AddAttr("is_load", mindspore::MakeValue(true));  // or the validator asks for an operator of Python
  std::vector<AnfNodePtr> inputs{mindspore::NewValueNode(primitive), x, gradient, group_list, accumulator};
  if (add->size() > 3) inputs.push_back(add->input(3));  // the monad
  const auto fused = add->func_graph()->NewCNode(inputs);
  fused->set_abstract(add->abstract());
  fused->set_scope(product->scope());
  fused->set_primal_attrs(product->primal_attrs());  // which forward operator it is the gradient of
  fused->set_debug_info(product->debug_info());
  (void)manager->Replace(add, fused);
  for (const auto &node : waiting) manager->SetEdge(node, 2, fused);
  return "";
}

// TupleGetItem, Reshape and Cast down to the weight's gradient that an AssignAdd takes; empty where it takes something else.
std::vector<CNodePtr> WayOf(const CNodePtr &add) {
  std::vector<CNodePtr> way;
  for (auto node = add->input(2)->cast<CNodePtr>(); node != nullptr; node = node->input(1)->cast<CNodePtr>()) {
    way.push_back(node);
    const auto name = NameOf(node);
    if (name == "GroupedMatmul") return IsWeightGradient(node) ? way : std::vector<CNodePtr>{};
    if (name != "TupleGetItem" && name != "Reshape" && name != "Cast") return {};  // a Cast to float32 loses nothing
  }
  return {};
}

class GroupedGradient : public mindspore::opt::Pass {
 public:
  GroupedGradient() : Pass("tc3_grouped_gradient") {}

  bool Run(const FuncGraphPtr &graph) override {
    auto manager = graph->manager();
    if (manager == nullptr) manager = mindspore::MakeManager({graph});
    std::vector<CNodePtr> additions;
    size_t gradients = 0, fused = 0;
    for (const auto &node : manager->all_nodes()) {
      if (const auto add = Operator(node, "AssignAdd"); add != nullptr) additions.push_back(add);
      const auto product = Operator(node, "GroupedMatmul");
      gradients += product != nullptr && IsWeightGradient(product);
    }
    std::string found = "no AssignAdd of it";
    for (const auto &add : additions) {
      const auto way = WayOf(add);
      if (way.empty()) continue;
      const auto problem = Fuse(manager, add, way);
      problem.empty() ? ++fused : (found = problem, fused);
    }
    if (fused < gradients) {
      MS_LOG(EXCEPTION) << kWords << gradients - fused << " of " << gradients
                        << " gradients of grouped weights cannot be added in place: " << found
                        << "; write plugins.grouped_gradient: False";
    }
    return fused > 0;
  }
};

class Plugin : public mindspore::opt::CustomPassPlugin {
 public:
  std::string GetPluginName() const override { return "tc3_grouped_gradient"; }
  std::vector<std::string> GetAvailablePassNames() const override { return {"tc3_grouped_gradient"}; }
  std::shared_ptr<mindspore::opt::Pass> CreatePass(const std::string &) const override {
    return std::make_shared<GroupedGradient>();
  }
};
}  // namespace
}  // namespace tc3

EXPORT_CUSTOM_PASS_PLUGIN(tc3::Plugin)
