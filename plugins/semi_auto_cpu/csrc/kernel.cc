#include "kernel.h"

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "backend/common/expander/fallback/fallback_irbuilder.h"
#include "host.h"
#include "kernel/cpu/cpu_kernel.h"
#include "replacement.h"
#include "text.h"

namespace tc3 {
namespace {
using mindspore::kernel::KernelTensor;
using Tensors = std::vector<KernelTensor *>;
using Factory = mindspore::kernel::Factory<mindspore::kernel::NativeCpuKernelMod>;

std::vector<void *> Addresses(const Tensors &tensors) {
  std::vector<void *> addresses;
  for (auto *tensor : tensors) addresses.push_back(tensor->device_ptr());
  return addresses;
}

class HostKernel : public mindspore::kernel::NativeCpuKernelMod {
 public:
  bool Init(const Tensors &, const Tensors &) override {
    operator_ = "\"name\":" + Quoted(OriginalName(kernel_name_)) + ",\"attrs\":" + AttributesText(primitive_);
    if (const auto arguments = primitive_->GetAttr(kArguments); arguments != nullptr) {
      operator_ += ",\"arguments\":" + mindspore::GetValue<std::string>(arguments);
    }
    return true;
  }

  // Comes before the first launch and whenever shapes change: the text is written here, not at every launch.
  int Resize(const Tensors &inputs, const Tensors &outputs) override {
    const int code = NativeCpuKernelMod::Resize(inputs, outputs);
    text_ = "{" + operator_ + ",\"inputs\":" + TensorsText(inputs) + ",\"outputs\":" + TensorsText(outputs) + "}";
    return code;
  }

  bool Launch(const Tensors &inputs, const Tensors &, const Tensors &outputs) override {
    CallHost(text_, Addresses(inputs).data(), Addresses(outputs).data());
    return true;
  }

  // any number of inputs of any types: Python refuses what it does not know
  std::vector<mindspore::kernel::KernelAttr> GetOpSupport() override {
    return {mindspore::kernel::KernelAttr().AddSkipCheckAttr(true)};
  }

 private:
  std::string operator_, text_;
};
std::set<std::string> &Registered() {
  static std::set<std::string> names;
  return names;
}

bool IsExpanded(const std::string &name) {
  return mindspore::expander::IRBuilderFactory::Instance().GetBuilder(name) != nullptr;
}

bool PassesFor(mindspore::TypeId type, mindspore::TypeId wanted) {
  using namespace mindspore;  // NOLINT: names of types only
  if (type == wanted) return true;
  if (wanted == kNumberTypeFloat32) return type == kNumberTypeFloat16 || type == kNumberTypeFloat64;
  return wanted == kNumberTypeInt32 && (type == kNumberTypeInt16 || type == kNumberTypeInt64);
}
}  // namespace

bool RegisterKernel(const std::string &name) {
  Registered().insert(name);
  const bool had = Factory::Instance().IsRegistered(name);
  Factory::Instance().UnRegister(name);
  Factory::Instance().Register(name, []() { return std::make_shared<HostKernel>(); });
  return had;
}

std::string RegisteredKernels() {
  std::string text;
  for (const auto &name : Registered()) text += (text.empty() ? "" : ",") + Quoted(name);
  return "[" + text + "]";
}

bool CanCompute(const std::string &name) { return Factory::Instance().IsRegistered(name) || IsExpanded(name); }

bool TakesType(const std::string &name, mindspore::TypeId type) {
  const auto choices = mindspore::kernel::NativeCpuKernelMod::GetCpuSupportedList(name);
  if (choices.empty() || IsExpanded(name)) return true;
  return std::any_of(choices.begin(), choices.end(), [type](const auto &choice) {
    if (choice.GetSkipCheck()) return true;
    for (size_t i = 0; i < choice.GetInputSize(); ++i) {
      if (PassesFor(type, choice.GetInputAttr(i).dtype)) return true;
    }
    return false;
  });
}
}  // namespace tc3
