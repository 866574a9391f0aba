#include "inlining.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host.h"
#include "ir/func_graph_cloner.h"
#include "ir/graph_utils.h"
#include "ir/scope.h"
#include "mindspore/include/custom_pass_api.h"
#include "text.h"

namespace tc3 {
namespace {
using mindspore::AnfNodePtr;
using mindspore::AnfNodePtrList;
using mindspore::CNodePtr;
using mindspore::FuncGraphManagerPtr;
using mindspore::FuncGraphPtr;
using mindspore::IsPrimitiveCNode;
using mindspore::prim::kPrimDepend;
using mindspore::prim::kPrimMakeTuple;
using mindspore::prim::kPrimPartial;
using mindspore::prim::kPrimTupleGetItem;
using mindspore::prim::kPrimUpdateState;

const std::set<std::string> kCollectives{
    "AllReduce", "AllGather", "ReduceScatter", "AlltoAll",           "AllToAll",
    "AlltoAllV", "AllToAllV", "Broadcast",     "_MiniStepAllGather", "_MicroStepAllGather"};

// The node behind its Depends; what they wait for goes to `waits`.
AnfNodePtr WithoutDepends(AnfNodePtr node, AnfNodePtrList *waits = nullptr) {
  while (IsPrimitiveCNode(node, kPrimDepend)) {
    const auto depend = node->cast<CNodePtr>();
    if (waits != nullptr) waits->push_back(depend->input(2));
    node = depend->input(1);
  }
  return node;
}

AnfNodePtr WithDepends(AnfNodePtr node, const AnfNodePtrList &waits, const FuncGraphPtr &root) {
  for (const auto &wait : waits) {
    const auto abstract = node->abstract();
    node = root->NewCNode({mindspore::NewValueNode(kPrimDepend), node, wait});
    node->set_abstract(abstract);
  }
  return node;
}

// The element of a MakeTuple that `item`, a TupleGetItem, takes; none where the tuple is not made in this graph.
AnfNodePtr Element(const CNodePtr &item, AnfNodePtrList *waits = nullptr) {
  const auto tuple = WithoutDepends(item->input(1), waits);
  if (!IsPrimitiveCNode(tuple, kPrimMakeTuple)) return nullptr;
  const auto index = mindspore::GetValue<int64_t>(mindspore::GetValueNode(item->input(2)));
  return tuple->cast<CNodePtr>()->input(index + 1);
}

// The Partial that a called node stands for, through tuples; none where a Switch decides.
CNodePtr Closure(const AnfNodePtr &node) {
  const auto bare = WithoutDepends(node);
  if (IsPrimitiveCNode(bare, kPrimPartial)) return bare->cast<CNodePtr>();
  if (!IsPrimitiveCNode(bare, kPrimTupleGetItem)) return nullptr;
  const auto element = Element(bare->cast<CNodePtr>());
  return element == nullptr ? nullptr : Closure(element);
}

std::vector<CNodePtr> NodesOf(const FuncGraphPtr &root) {
  std::vector<CNodePtr> nodes;
  for (const auto &node : mindspore::TopoSort(root->get_return())) {
    const auto cnode = node->cast<CNodePtr>();
    if (cnode != nullptr && cnode->func_graph() == root) nodes.push_back(cnode);
  }
  return nodes;
}

// Puts the body of the graph that `call` calls in its place; false where it calls none that is known.
bool Inline(const CNodePtr &call, const FuncGraphPtr &root, const FuncGraphManagerPtr &manager) {
  AnfNodePtrList args(call->inputs().begin() + 1, call->inputs().end());
  // A call waits for all its arguments, even for those that its body does not use, and for what those wait for. What
  // is computed for the body must do so from now on: the order of Sends, Receives and micro-batches hangs on it.
  AnfNodePtrList waits;
  for (const auto &arg : args) (void)WithoutDepends(arg, &waits);
  auto graph = mindspore::GetValueNode<FuncGraphPtr>(call->input(0));
  if (graph == nullptr && call->input(0)->isa<mindspore::CNode>()) {
    const auto closure = Closure(call->input(0));
    if (closure == nullptr) return false;
    graph = mindspore::GetValueNode<FuncGraphPtr>(closure->input(1));
    args.insert(args.begin(), closure->inputs().begin() + 2, closure->inputs().end());
  }
  if (graph == nullptr || graph->recursive()) return false;  // a loop stays a call
  for (auto &arg : args) {
    const bool tensor = arg->abstract() != nullptr && arg->abstract()->isa<mindspore::abstract::AbstractTensor>();
    if (!tensor || !arg->isa<mindspore::CNode>() || WithoutDepends(arg)->isa<mindspore::Parameter>()) continue;
    arg = WithDepends(arg, waits, root);
  }
  (void)manager->Replace(call, mindspore::InlineClone(graph, root, args));
  return true;
}

// What a node should wait for instead of `node`: one kernel graph cannot hold a tuple with a closure in it, so the
// tuple's first tensor stands for it.
AnfNodePtr Waitable(const AnfNodePtr &node) {
  const auto bare = WithoutDepends(node);
  if (!IsPrimitiveCNode(bare, kPrimMakeTuple)) return node;
  const auto tuple = bare->cast<CNodePtr>();
  for (size_t i = 1; i < tuple->size(); ++i) {
    if (IsPrimitiveCNode(tuple->input(i), kPrimPartial)) return Waitable(tuple->input(1));
  }
  return node;
}

bool WaitForTensors(const CNodePtr &node, const FuncGraphManagerPtr &manager) {
  if (!IsPrimitiveCNode(node, kPrimDepend) && !IsPrimitiveCNode(node, kPrimUpdateState)) return false;
  bool changed = false;
  for (size_t i = 2; i < node->size(); ++i) {
    const auto other = Waitable(node->input(i));
    if (other == node->input(i)) continue;
    manager->SetEdge(node, static_cast<int>(i), other);
    changed = true;
  }
  return changed;
}

// A TupleGetItem of a MakeTuple is the element itself, which then waits for all that the tuple waited for.
bool TakeElement(const CNodePtr &node, const FuncGraphPtr &root, const FuncGraphManagerPtr &manager) {
  if (!IsPrimitiveCNode(node, kPrimTupleGetItem)) return false;
  AnfNodePtrList waits;
  const auto element = Element(node, &waits);
  if (element == nullptr) return false;
  (void)manager->Replace(node, WithDepends(element, waits, root));
  return true;
}

// A number for the group of a collective, by the distances of its ranks, that is alike on all ranks. The names of
// groups are not: the group over an axis has another name on each of its lines.
unsigned int GroupOrder(const mindspore::PrimitivePtr &primitive) {
  const auto group = primitive->GetAttr("group");
  if (group == nullptr || !group->isa<mindspore::StringImm>()) return 0;
  unsigned int number = 0;
  void *outputs[] = {&number};
  const auto name = Quoted(mindspore::GetValue<std::string>(group));
  CallHost("{\"event\":\"group_order\",\"group\":" + name + "}", nullptr, outputs);
  return number;
}
}  // namespace

void InlineCalls(const FuncGraphPtr &root, const FuncGraphManagerPtr &manager) {
  // One call at a time, in the order of computation: what a later call has to wait for shows only when the calls
  // before it, and those in their bodies, are gone.
  const auto inline_first = [&root, &manager]() {
    const auto nodes = NodesOf(root);
    return std::any_of(nodes.begin(), nodes.end(), [&](const auto &node) { return Inline(node, root, manager); });
  };
  while (inline_first()) {
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (const auto &node : NodesOf(root)) {
      if (!manager->all_nodes().contains(node)) continue;  // gone with another one
      changed |= WaitForTensors(node, manager) || TakeElement(node, root, manager);
    }
  }
}

// The backend chooses an order among nodes that do not depend on each other by all nodes of a graph: a rank whose graph
// lacks one (x - 0 is x) may choose another order than its peers. Each then waits in a collective that the other has
// not reached, because one thread runs them. The order here follows from what is alike on all ranks: how many
// collectives a collective has to wait for, one after another, its place in the model, its operator and shape, and the
// distances between the ranks of its group; among collectives that are equal in all of these, from the order of uses.
// In a pipeline the schedule decides what waits for a Receive, and this order does not know it.
void OrderCollectives(const FuncGraphPtr &root, const FuncGraphManagerPtr &manager) {
  std::map<AnfNodePtr, int64_t> levels;
  std::vector<std::pair<std::tuple<int64_t, std::string, std::string, unsigned int>, CNodePtr>> found;
  for (const auto &node : NodesOf(root)) {
    int64_t level = 0;
    for (const auto &input : node->inputs()) {
      if (const auto known = levels.find(input); known != levels.end()) level = std::max(level, known->second);
    }
    const auto primitive = mindspore::GetValueNode<mindspore::PrimitivePtr>(node->input(0));
    const std::string name = primitive == nullptr ? "" : primitive->name();
    if (name == "Receive") return;
    if (kCollectives.count(name) > 0) {
      const auto weight = primitive->GetAttr("mirror_user_id");
      const std::string place = node->scope() == nullptr ? "" : node->scope()->name();
      const std::string shape = node->abstract() == nullptr ? "" : node->abstract()->BuildShape()->ToString();
      const std::string what = name + " " + (weight == nullptr ? "" : weight->ToString()) + " " + shape;
      found.emplace_back(std::make_tuple(level, place, what, GroupOrder(primitive)), node);
      ++level;
    }
    levels[node] = level;
  }
  std::stable_sort(found.begin(), found.end(), [](const auto &a, const auto &b) { return a.first < b.first; });
  for (size_t i = 1; i < found.size(); ++i) {
    const auto &node = found[i].second;
    const auto given = node->input(1);
    if (given->abstract() == nullptr || !given->abstract()->isa<mindspore::abstract::AbstractTensor>()) continue;
    manager->SetEdge(node, 1, WithDepends(given, {found[i - 1].second}, root));
  }
}
}  // namespace tc3
