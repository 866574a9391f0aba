#include "replacement.h"

#include <algorithm>
#include <memory>

#include "abstract/ops/primitive_infer_map.h"
#include "infer.h"
#include "kernel.h"
#include "mindspore/include/custom_pass_api.h"
#include "text.h"

namespace tc3 {
namespace {
using mindspore::abstract::AbstractBasePtr;
using mindspore::abstract::AbstractBasePtrList;

// Attributes of a new operator, for its infer. They are of kinds that MindIR holds, so that a graph can be kept in a
// file (MindSpore's compile cache) and loaded: MindIR has no operator as an attribute, and no tuple with a None in it.
constexpr char kPlaces[] = "tc3_places";
constexpr char kConstants[] = "tc3_constant_";  // with a number behind it: an attribute each
constexpr char kLoaded[] = "is_load";

std::set<std::string> g_replaced;
std::set<std::string> g_low;  // with tensors of bfloat16 or float16 only

// Where the original's arguments went, in their order; `count` is how many tensors or numbers one of them holds.
enum Place : int64_t { kTensor, kTensorList, kNumbers, kConstant };
struct Arguments {
  std::vector<mindspore::AnfNodePtr> tensors, monads;
  std::vector<int64_t> places;  // place, count, place, count, ...
  std::vector<mindspore::ValuePtr> constants;
  std::string text;

  void Add(Place place, size_t count, const std::string &words) {
    places.insert(places.end(), {place, static_cast<int64_t>(count)});
    text += (text.empty() ? "" : ",") + words;
  }
};

bool IsTensor(const mindspore::AnfNodePtr &node) {
  return node->abstract() != nullptr && node->abstract()->isa<mindspore::abstract::AbstractTensor>();
}

bool IsTensorList(const mindspore::AnfNodePtr &node) {
  if (!mindspore::IsPrimitiveCNode(node, mindspore::prim::kPrimMakeTuple)) return false;
  const auto tuple = node->cast<mindspore::CNodePtr>();
  return tuple->size() > 1 && IsTensor(tuple->input(1));
}

// A tuple of numbers that is computed as a tensor (ends of documents, rows of experts).
bool IsTensorAsNumbers(const mindspore::AnfNodePtr &node) {
  static const auto operation = std::make_shared<mindspore::Primitive>("TensorToTuple");
  return mindspore::IsPrimitiveCNode(node, operation);
}

void Take(const mindspore::AnfNodePtr &input, Arguments *all) {
  if (mindspore::HasAbstractMonad(input)) {
    all->monads.push_back(input);
  } else if (IsTensorList(input)) {
    const auto tuple = input->cast<mindspore::CNodePtr>();
    all->tensors.insert(all->tensors.end(), tuple->inputs().begin() + 1, tuple->inputs().end());
    all->Add(kTensorList, tuple->size() - 1, "{\"list\":" + std::to_string(tuple->size() - 1) + "}");
  } else if (IsTensor(input)) {
    all->tensors.push_back(input);
    all->Add(kTensor, 1, "{}");
  } else if (IsTensorAsNumbers(input)) {
    all->tensors.push_back(input->cast<mindspore::CNodePtr>()->input(1));
    all->Add(kNumbers, input->abstract()->cast<mindspore::abstract::AbstractTuplePtr>()->size(), "{}");
  } else {
    const auto value = input->abstract() == nullptr ? mindspore::kNone : input->abstract()->BuildValue();
    all->constants.push_back(value);
    all->Add(kConstant, 1, "{\"value\":" + ValueText(value) + "}");
  }
}

// At run time (dynamic shapes) arguments are KernelTensors. They know their values, and refuse what some infer
// functions ask of other abstracts.
AbstractBasePtr Plain(const AbstractBasePtr &tensor) {
  if (std::dynamic_pointer_cast<mindspore::kernel::KernelTensor>(tensor) == nullptr) return tensor;
  auto type = tensor->GetType();
  if (type->isa<mindspore::TensorType>()) type = type->cast<mindspore::TensorTypePtr>()->element();
  return std::make_shared<mindspore::abstract::AbstractTensor>(type, tensor->GetShape()->Clone());
}

// Numbers that are known only when the step runs, as the axes over which the gradient of a broadcast of routed rows is
// summed.
bool IsUnknown(const mindspore::AnfNodePtr &input) {
  if (mindspore::HasAbstractMonad(input) || IsTensor(input) || IsTensorList(input) || IsTensorAsNumbers(input)) {
    return false;
  }
  const auto value = input->abstract() == nullptr ? nullptr : input->abstract()->BuildValue();
  return value != nullptr && value->ContainsValueAny();
}

mindspore::CNodePtr Cast(const mindspore::AnfNodePtr &tensor, const mindspore::TypePtr &type,
                         const mindspore::FuncGraphPtr &graph) {
  const auto number = mindspore::NewValueNode(static_cast<int64_t>(type->type_id()));
  number->set_abstract(mindspore::GetValueNode(number)->ToAbstract());
  const auto operation = std::make_shared<mindspore::Primitive>("Cast");
  const auto cast = graph->NewCNode({mindspore::NewValueNode(operation), tensor, number});
  cast->set_abstract(
    std::make_shared<mindspore::abstract::AbstractTensor>(type, tensor->abstract()->GetShape()->Clone()));
  return cast;
}

mindspore::TypePtr ElementType(const AbstractBasePtr &tensor) {
  return tensor->cast<mindspore::abstract::AbstractTensorPtr>()->element()->BuildType();
}

bool IsLow(const mindspore::TypePtr &type) {
  return type->type_id() == mindspore::kNumberTypeBFloat16 || type->type_id() == mindspore::kNumberTypeFloat16;
}

AbstractBasePtr UnknownNumbers(size_t count) {
  const auto number = std::make_shared<mindspore::abstract::AbstractScalar>(mindspore::kValueAny, mindspore::kInt64);
  return std::make_shared<mindspore::abstract::AbstractTuple>(AbstractBasePtrList(count, number));
}

std::string ConstantName(size_t number) { return kConstants + std::to_string(number); }

mindspore::ValuePtr Constant(const mindspore::PrimitivePtr &host, size_t number) {
  const auto constant = host->GetAttr(ConstantName(number));
  if (constant == nullptr) MS_LOG(EXCEPTION) << "semi_auto_cpu: " << host->name() << " has no constant " << number;
  return constant;
}

// The operator that `host` stands for: its name, and the attributes that it had.
mindspore::PrimitivePtr Original(const mindspore::PrimitivePtr &host) {
  const auto original = std::make_shared<mindspore::Primitive>(OriginalName(host->name()));
  for (const auto &[name, value] : host->attrs()) {
    if (name.rfind(kPrivate, 0) != 0 && name != kLoaded) original->AddAttr(name, value);
  }
  return original;
}

void AddTypes(const mindspore::abstract::AbstractBasePtr &abstract, std::set<mindspore::TypeId> *types) {
  if (abstract == nullptr) return;
  if (abstract->isa<mindspore::abstract::AbstractTensor>()) {
    types->insert(abstract->cast<mindspore::abstract::AbstractTensorPtr>()->element()->BuildType()->type_id());
  } else if (abstract->isa<mindspore::abstract::AbstractTuple>()) {
    for (const auto &item : abstract->cast<mindspore::abstract::AbstractTuplePtr>()->elements()) AddTypes(item, types);
  }
}
}  // namespace

void ReplaceOperator(const std::string &name, bool low) {
  (low ? g_low : g_replaced).insert(name);
  (void)RegisterKernel(kPrefix + name);
  RegisterInfer(kPrefix + name, name);
}

bool IsReplaced(const mindspore::CNodePtr &cnode) {
  const auto &name = mindspore::GetValueNode<mindspore::PrimitivePtr>(cnode->input(0))->name();
  if (g_replaced.count(name) > 0) return true;
  if (g_low.count(name) == 0) return false;
  auto types = InputTypes(cnode);
  AddTypes(cnode->abstract(), &types);
  return types.count(mindspore::kNumberTypeBFloat16) + types.count(mindspore::kNumberTypeFloat16) > 0;
}

std::set<mindspore::TypeId> InputTypes(const mindspore::CNodePtr &cnode) {
  std::set<mindspore::TypeId> types;
  for (size_t i = 1; i < cnode->size(); ++i) AddTypes(cnode->input(i)->abstract(), &types);
  return types;
}

std::string OriginalName(const std::string &name) {
  return name.rfind(kPrefix, 0) == 0 ? name.substr(sizeof(kPrefix) - 1) : name;
}

mindspore::CNodePtr Replaced(const mindspore::CNodePtr &cnode) {
  const auto original = mindspore::GetValueNode<mindspore::PrimitivePtr>(cnode->input(0));
  Arguments all;
  for (size_t i = 1; i < cnode->size(); ++i) {
    try {
      Take(cnode->input(i), &all);
    } catch (const std::exception &error) {
      MS_LOG(EXCEPTION) << "semi_auto_cpu: " << original->name() << ", input " << i << " ("
                        << cnode->input(i)->DebugString() << "): " << error.what();
    }
  }
  const auto host = std::make_shared<mindspore::Primitive>(kPrefix + original->name());
  for (const auto &[name, value] : original->attrs()) host->AddAttr(name, value);
  host->AddAttr(kArguments, mindspore::MakeValue("[" + all.text + "]"));
  host->AddAttr(kPlaces, mindspore::MakeValue(all.places));
  for (size_t i = 0; i < all.constants.size(); ++i) host->AddAttr(ConstantName(i), all.constants[i]);
  host->AddAttr(kLoaded, mindspore::MakeValue(true));  // or the validator refuses an operator without a Python class
  std::vector<mindspore::AnfNodePtr> inputs{mindspore::NewValueNode(host)};
  inputs.insert(inputs.end(), all.tensors.begin(), all.tensors.end());
  inputs.insert(inputs.end(), all.monads.begin(), all.monads.end());
  const auto call = cnode->func_graph()->NewCNode(inputs);
  call->set_abstract(cnode->abstract());
  call->set_scope(cnode->scope());
  return call;
}

bool TakesUnknownNumbers(const mindspore::CNodePtr &cnode) {
  const auto &name = mindspore::GetValueNode<mindspore::PrimitivePtr>(cnode->input(0))->name();
  const auto is_low_only = g_replaced.count(name) == 0 && cnode->abstract() != nullptr &&
                           cnode->abstract()->isa<mindspore::abstract::AbstractTensor>();
  return is_low_only && std::any_of(cnode->inputs().begin() + 1, cnode->inputs().end(), IsUnknown);
}

mindspore::CNodePtr Widened(const mindspore::CNodePtr &cnode) {
  const auto graph = cnode->func_graph();
  auto inputs = cnode->inputs();
  for (auto &input : inputs) {
    if (IsTensor(input) && IsLow(ElementType(input->abstract()))) input = Cast(input, mindspore::kFloat32, graph);
  }
  const auto wide = graph->NewCNode(inputs);
  wide->set_scope(cnode->scope());
  const auto type = ElementType(cnode->abstract());
  wide->set_abstract(std::make_shared<mindspore::abstract::AbstractTensor>(
    IsLow(type) ? mindspore::kFloat32 : type, cnode->abstract()->GetShape()->Clone()));
  return IsLow(type) ? Cast(wide, type, graph) : wide;
}

std::pair<mindspore::PrimitivePtr, AbstractBasePtrList> OriginalCall(const mindspore::PrimitivePtr &host,
                                                                     const AbstractBasePtrList &tensors,
                                                                     const std::set<int64_t> &by_value) {
  const auto places = mindspore::GetValue<std::vector<int64_t>>(host->GetAttr(kPlaces));
  AbstractBasePtrList arguments;
  size_t tensor = 0, constant = 0;
  for (size_t i = 0; i < places.size(); i += 2) {
    const auto count = static_cast<size_t>(places[i + 1]);
    switch (places[i]) {
      case kTensor:
        arguments.push_back(by_value.count(arguments.size()) > 0 ? tensors.at(tensor) : Plain(tensors.at(tensor)));
        ++tensor;
        break;
      case kTensorList: {
        AbstractBasePtrList list;
        for (size_t n = 0; n < count; ++n) list.push_back(Plain(tensors.at(tensor++)));
        arguments.push_back(std::make_shared<mindspore::abstract::AbstractTuple>(list));
        break;
      }
      case kNumbers:
        ++tensor;
        arguments.push_back(UnknownNumbers(count));
        break;
      default:
        arguments.push_back(Constant(host, constant++)->ToAbstract());
    }
  }
  return {Original(host), arguments};
}
}  // namespace tc3
