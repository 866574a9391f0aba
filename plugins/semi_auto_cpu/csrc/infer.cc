#include "infer.h"

#include <memory>

#include "abstract/ops/primitive_infer_map.h"
#include "replacement.h"

namespace tc3 {
namespace {
using mindspore::PrimitivePtr;
using mindspore::abstract::AbstractBasePtr;
using mindspore::abstract::AbstractBasePtrList;

// MindSpore has two kinds of infer functions: those of its YAML operators (`...ByFuncImpl`) and the older classes.
class OriginalInfer : public mindspore::abstract::OpInferBase {
 public:
  mindspore::abstract::BaseShapePtr InferShape(const PrimitivePtr &host, const AbstractBasePtrList &args) const override {
    const auto [original, whole] = OriginalCall(host, args);
    if (const auto shape = mindspore::abstract::InferShapeByFuncImpl(original, whole); shape.has_value()) return *shape;
    return Older(original).InferShape(original, whole);
  }

  mindspore::TypePtr InferType(const PrimitivePtr &host, const AbstractBasePtrList &args) const override {
    const auto [original, whole] = OriginalCall(host, args);
    if (const auto type = mindspore::abstract::InferTypeByFuncImpl(original, whole); type.has_value()) return *type;
    return Older(original).InferType(original, whole);
  }

  AbstractBasePtr InferShapeAndType(const mindspore::abstract::AnalysisEnginePtr &engine, const PrimitivePtr &host,
                                    const AbstractBasePtrList &args) const override {
    const auto [original, whole] = OriginalCall(host, args);
    if (const auto both = mindspore::abstract::TryInferAbstract(original, whole); both.has_value()) return *both;
    return Older(original).InferShapeAndType(engine, original, whole);
  }

 private:
  static mindspore::abstract::StandardPrimitiveImplReg Older(const PrimitivePtr &original) {
    const auto found = mindspore::abstract::GetPrimitiveInferImpl(original);
    if (!found.has_value()) MS_LOG(EXCEPTION) << "semi_auto_cpu: MindSpore cannot infer " << original->name();
    return *found;
  }
};
}  // namespace

void RegisterInfer(const std::string &name) {
  const mindspore::abstract::StandardPrimitiveImplReg infer(std::make_shared<OriginalInfer>(), false);
  mindspore::abstract::GetPrimitiveInferMapPtr()->emplace(std::make_shared<mindspore::Primitive>(name), infer);
}
}  // namespace tc3
