#include "text.h"

#include <cmath>
#include <cstdio>
#include <sstream>

namespace tc3 {
namespace {
std::string Number(double value) {
  if (std::isnan(value)) return "NaN";  // these three words are Python's own extension of JSON
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  std::ostringstream out;
  out.precision(17);  // enough to read the same double back
  out << value;
  const auto text = out.str();
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

template <typename Items, typename Function>
std::string Joined(const Items &items, const Function &text) {
  std::string out = "[";
  for (size_t i = 0; i < items.size(); ++i) out += (i ? "," : "") + text(items[i]);
  return out + "]";
}
}  // namespace

std::string Quoted(const std::string &text) {
  std::string out = "\"";
  for (const unsigned char letter : text) {
    if (letter == '"' || letter == '\\') {
      out += {'\\', static_cast<char>(letter)};
    } else if (letter < ' ') {
      char code[8];
      (void)snprintf(code, sizeof(code), "\\u%04x", letter);
      out += code;
    } else {
      out += static_cast<char>(letter);
    }
  }
  return out + "\"";
}

std::string ValueText(const mindspore::ValuePtr &value) {
  using mindspore::GetValue;
  if (value == nullptr || value->isa<mindspore::None>()) return "null";
  if (value->ContainsValueAny()) MS_LOG(EXCEPTION) << "the front end does not know this value yet";
  if (value->isa<mindspore::ValueSequence>()) {
    return Joined(value->cast<mindspore::ValueSequencePtr>()->value(), ValueText);
  }
  if (value->isa<mindspore::BoolImm>()) return GetValue<bool>(value) ? "true" : "false";
  if (value->isa<mindspore::FP32Imm>()) return Number(GetValue<float>(value));
  if (value->isa<mindspore::FP64Imm>()) return Number(GetValue<double>(value));
  if (value->isa<mindspore::IntegerImm>()) return value->ToString();
  if (value->isa<mindspore::StringImm>()) return Quoted(GetValue<std::string>(value));
  if (value->isa<mindspore::Type>()) return Quoted(value->ToString());  // a dtype
  MS_LOG(EXCEPTION) << "Python gets no constant of the kind " << value->type_name() << ": " << value->ToString();
}

std::string AttributesText(const mindspore::PrimitivePtr &primitive) {
  std::string out;
  for (const auto &[name, value] : primitive->attrs()) {
    if (value == nullptr || name.rfind(kPrivate, 0) == 0) continue;
    out += (out.empty() ? "" : ",") + Quoted(name) + ":" + Quoted(value->ToString());
  }
  return "{" + out + "}";
}

std::string TensorsText(const std::vector<mindspore::kernel::KernelTensor *> &tensors) {
  return Joined(tensors, [](const auto *tensor) {
    if (tensor->type_id() != mindspore::kObjectTypeTensorType) {
      return "{\"value\":" + ValueText(tensor->GetValue()) + "}";
    }
    const auto shape = Joined(tensor->GetShapeVector(), [](int64_t size) { return std::to_string(size); });
    return "{\"type\":" + Quoted(mindspore::TypeIdToString(tensor->dtype_id())) +
           ",\"bytes\":" + std::to_string(tensor->size()) + ",\"shape\":" + shape + "}";
  });
}
}  // namespace tc3
