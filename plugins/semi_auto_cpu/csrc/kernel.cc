#include "kernel.h"

#include <memory>
#include <vector>

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
}  // namespace

bool RegisterKernel(const std::string &name) {
  const bool had = HasKernel(name);
  Factory::Instance().UnRegister(name);
  Factory::Instance().Register(name, []() { return std::make_shared<HostKernel>(); });
  return had;
}

bool HasKernel(const std::string &name) { return Factory::Instance().IsRegistered(name); }
}  // namespace tc3
