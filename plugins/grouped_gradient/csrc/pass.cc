// AssignAdd(accumulator, Reshape(GroupedMatmul(TransposeExtView(x), gradient))) as one InplaceGroupedMatmulAdd, and
// where AssignAdd takes the sum of several such products, as many of them one after the other.
//
// MindSpore's own grouped_matmul_assignadd_fusion does the same without the Reshape, which MindFormers' experts have
// because their weights are of two dimensions; the operator takes an accumulator of two dimensions, too.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ir/graph_utils.h"
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
constexpr char kRecomputed[] = "duplicated";  // MindSpore's mark on an operator that runs again before the backward pass

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
  primitive->AddAttr("is_load", mindspore::MakeValue(true));  // or the validator asks for an operator of Python
  return primitive;
}

// The gradient of grouped weights, and what it is the product of.
struct Product {
  CNodePtr node;
  AnfNodePtr x, gradient, group_list;
};

// What an AssignAdd takes: the sum of the gradients of a micro-batch's chunks of tokens, or the gradient of all tokens.
struct Taken {
  struct Part {
    CNodePtr node;
    size_t first, end;  // of the products that it is made of
  };
  std::vector<Product> products;
  std::vector<Part> parts;  // the products, and what stands between them and the AssignAdd
  std::string other;        // what is added to them besides
};

void Take(const AnfNodePtr &node, Taken *taken) {
  const auto name = NameOf(node);
  const auto cnode = name.empty() ? nullptr : node->cast<CNodePtr>();
  const auto first = taken->products.size();
  const auto is_this = [&cnode](const Taken::Part &part) { return part.node == cnode; };
  if (std::any_of(taken->parts.begin(), taken->parts.end(), is_this)) {
    taken->other = "the same " + name + " again";
    return;
  }
  if (name == "GroupedMatmul" && IsWeightGradient(cnode)) {
    taken->products.push_back({cnode, nullptr, nullptr, cnode->input(kGroupList)});
  } else if (name == "Reshape" || name == "Cast" || name == "AddN" ||  // a Cast to float32 loses nothing
             (name == "TupleGetItem" && NameOf(cnode->input(1)) == "GroupedMatmul")) {
    Take(cnode->input(1), taken);
  } else if (name == "Add" || name == "MakeTuple") {
    for (size_t i = 1; i < cnode->size(); ++i) Take(cnode->input(i), taken);
  } else {
    taken->other = name.empty() ? "what is no operator" : name;
    return;
  }
  taken->parts.push_back({cnode, first, taken->products.size()});
}

// Finds what a product multiplies; returns what stands in the way of adding it in place, "" where nothing does.
std::string Read(Product *product) {
  const auto &node = product->node;
  for (size_t i = kFirstUnused; i <= kLastUnused; ++i) {
    if (!IsNone(node->input(i))) return "a GroupedMatmul with biases or scales";
  }
  if (Constant<bool>(node->input(kTransposeB - 1)) != false || Constant<bool>(node->input(kTransposeB)) != false) {
    return "a GroupedMatmul that transposes by itself";
  }
  const auto rows = Only(node->input(1));
  product->x = rows == nullptr ? nullptr : Untransposed(rows);
  product->gradient = Only(node->input(2));
  if (product->x == nullptr || product->gradient == nullptr) {
    return "a GroupedMatmul of other inputs than one transposed view";
  }
  const auto type = TypeOf(product->x);
  if (!IsLow(type) || TypeOf(product->gradient) != type) return "rows that are not bfloat16 or float16";
  if (TypeOf(product->group_list) != mindspore::kNumberTypeInt64) return "a group_list that is not int64";
  return "";
}

// The products' numbers, sorted by how many operators of the backward pass must run one after another before all that a
// product multiplies is there: the first can run first, and none waits for one that waits for it. What is recomputed for
// them does not count: the chunks' backward passes follow each other in the order of their collectives.
std::vector<size_t> Sorted(const std::vector<Product> &products, const CNodePtr &add) {
  std::map<AnfNodePtr, size_t> steps;
  for (const auto &node : mindspore::TopoSort(add)) {
    auto &longest = steps[node];
    const auto cnode = node->cast<CNodePtr>();
    if (cnode == nullptr) continue;
    for (const auto &input : cnode->inputs()) longest = std::max(longest, steps[input]);
    longest += !cnode->HasAttr(kRecomputed);
  }
  std::multimap<size_t, size_t> sorted;
  for (size_t i = 0; i < products.size(); ++i) {
    const auto &product = products[i];
    sorted.emplace(std::max({steps[product.x], steps[product.gradient], steps[product.group_list]}), i);
  }
  std::vector<size_t> numbers;
  for (const auto &[step, number] : sorted) numbers.push_back(number);
  return numbers;
}

// InplaceGroupedMatmulAdd in the place of `add`, after `last` where that is not the first. Each has the accumulator
// itself as its input, so that it is written whether or not a kernel's result shares its memory.
CNodePtr Addition(const CNodePtr &add, const Product &product, const CNodePtr &last) {
  const auto graph = add->func_graph();
  auto accumulator = add->input(1);
  if (last != nullptr) {
    const auto after = graph->NewCNode({mindspore::NewValueNode(mindspore::prim::kPrimDepend), accumulator, last});
    after->set_abstract(accumulator->abstract());
    accumulator = after;
  }
  std::vector<AnfNodePtr> inputs{mindspore::NewValueNode(Operation()), product.x, product.gradient, product.group_list,
                                 accumulator};
  if (add->size() > 3) inputs.push_back(add->input(3));  // the monad
  const auto fused = graph->NewCNode(inputs);
  fused->set_abstract(add->abstract());
  fused->set_scope(product.node->scope());
  fused->set_primal_attrs(product.node->primal_attrs());  // which forward operator it is the gradient of
  fused->set_debug_info(product.node->debug_info());
  return fused;
}

// What stands in the way of adding in place all that one AssignAdd takes; "" where it was replaced.
std::string Fuse(const FuncGraphManagerPtr &manager, const CNodePtr &add, Taken *taken) {
  if (!taken->other.empty()) return "a sum with " + taken->other;
  for (auto &product : taken->products) {
    if (const auto problem = Read(&product); !problem.empty()) return problem;
  }
  if (TypeOf(add->input(1)) != mindspore::kNumberTypeFloat32) return "an accumulator that is not float32";
  std::vector<std::pair<CNodePtr, const Taken::Part *>> waiting;
  for (const auto &part : taken->parts) {
    std::vector<CNodePtr> of_part;
    if (Users(manager, part.node, &of_part) != 1) return "another user of " + NameOf(part.node);
    for (const auto &node : of_part) waiting.emplace_back(node, &part);
  }
  if (Operation() == nullptr) return "a MindSpore whose InplaceGroupedMatmulAdd does not write its last input";
  std::vector<CNodePtr> additions;
  std::vector<size_t> places(taken->products.size());
  for (const auto number : Sorted(taken->products, add)) {
    const auto last = additions.empty() ? nullptr : additions.back();
    places[number] = additions.size();
    additions.push_back(Addition(add, taken->products[number], last));
  }
  (void)manager->Replace(add, additions.back());
  for (const auto &[node, part] : waiting) {
    const auto latest = std::max_element(places.begin() + part->first, places.begin() + part->end);
    manager->SetEdge(node, 2, additions[*latest]);
  }
  return "";
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
      Taken taken;
      Take(add->input(2), &taken);
      if (taken.products.empty()) continue;
      if (const auto problem = Fuse(manager, add, &taken); !problem.empty()) {
        found = problem;
      } else {
        fused += taken.products.size();
      }
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
