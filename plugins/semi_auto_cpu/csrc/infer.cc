#include "infer.h"

#include <memory>
#include <set>

#include "abstract/ops/primitive_infer_map.h"
#include "replacement.h"

namespace tc3 {
namespace {
using mindspore::PrimitivePtr;
using mindspore::abstract::AbstractBasePtr;
using mindspore::abstract::AbstractBasePtrList;
using mindspore::abstract::BaseShapePtr;

// What a rank may receive nothing of. MindSpore documents the shape () and "no actual meaning" for that case, on which
// a Reshape to rows fails; (0) is meant.
const std::set<std::string> kRows{"AlltoAllV", "AlltoAllVC"};

BaseShapePtr WithoutRows(const PrimitivePtr &original, const BaseShapePtr &shape) {
  const bool empty = shape->isa<mindspore::abstract::TensorShape>() && shape->GetShapeVector().empty();
  if (!empty || kRows.count(original->name()) == 0) return shape;
  return std::make_shared<mindspore::abstract::TensorShape>(mindspore::ShapeVector{0});
}

std::optional<mindspore::abstract::StandardPrimitiveImplReg> OlderInfer(const std::string &name) {
  return mindspore::abstract::GetPrimitiveInferImpl(std::make_shared<mindspore::Primitive>(name));
}

// MindSpore has two kinds of infer functions: those of its YAML operators (`...ByFuncImpl`) and the older classes.
class OriginalInfer : public mindspore::abstract::OpInferBase {
 public:
  explicit OriginalInfer(const std::string &original) {
    const auto older = OlderInfer(original);
    if (older.has_value() && older->Get() != nullptr) by_value_ = older->Get()->GetValueDependArgIndices();
  }

  // Right where only tensors come before them, as in AlltoAllV; another input is fetched for nothing.
  std::set<int64_t> GetValueDependArgIndices() const override { return by_value_; }

  BaseShapePtr InferShape(const PrimitivePtr &host, const AbstractBasePtrList &args) const override {
    const auto [original, whole] = OriginalCall(host, args, by_value_);
    if (const auto shape = mindspore::abstract::InferShapeByFuncImpl(original, whole); shape.has_value()) return *shape;
    return WithoutRows(original, Older(original).InferShape(original, whole));
  }

  mindspore::TypePtr InferType(const PrimitivePtr &host, const AbstractBasePtrList &args) const override {
    const auto [original, whole] = OriginalCall(host, args, by_value_);
    if (const auto type = mindspore::abstract::InferTypeByFuncImpl(original, whole); type.has_value()) return *type;
    return Older(original).InferType(original, whole);
  }

  AbstractBasePtr InferShapeAndType(const mindspore::abstract::AnalysisEnginePtr &engine, const PrimitivePtr &host,
                                    const AbstractBasePtrList &args) const override {
    const auto [original, whole] = OriginalCall(host, args, by_value_);
    const auto tried = mindspore::abstract::TryInferAbstract(original, whole);
    const auto both = tried.has_value() ? *tried : Older(original).InferShapeAndType(engine, original, whole);
    if (both->isa<mindspore::abstract::AbstractTensor>()) both->set_shape(WithoutRows(original, both->GetShape()));
    return both;
  }

 private:
  static mindspore::abstract::StandardPrimitiveImplReg Older(const PrimitivePtr &original) {
    const auto found = OlderInfer(original->name());
    if (!found.has_value()) MS_LOG(EXCEPTION) << "semi_auto_cpu: MindSpore cannot infer " << original->name();
    return *found;
  }

  std::set<int64_t> by_value_;
};
}  // namespace

void RegisterInfer(const std::string &name, const std::string &original) {
  const mindspore::abstract::StandardPrimitiveImplReg infer(std::make_shared<OriginalInfer>(original), false);
  mindspore::abstract::GetPrimitiveInferMapPtr()->emplace(std::make_shared<mindspore::Primitive>(name), infer);
}
}  // namespace tc3
