// A CPU kernel of any operator, computed by Python.
#ifndef TC3_KERNEL_H_
#define TC3_KERNEL_H_

#include <string>

#include "mindapi/base/type_id.h"

namespace tc3 {
// From now on Python computes the operator `name` on CPU. Returns whether MindSpore had a kernel of its own.
bool RegisterKernel(const std::string &name);

// ["name", ...]: the operators for which that was said, by Python or by the pass.
std::string RegisteredKernels();

// Whether anything on CPU computes the operator `name`: a kernel, or other operators that MindSpore expands it to.
bool CanCompute(const std::string &name);

// Whether its kernel may take tensors of a type. MindSpore's kernels list their types; float16 and float64 pass for
// float32 and small integers for int32, because MindSpore then inserts casts.
bool TakesType(const std::string &name, mindspore::TypeId type);
}  // namespace tc3
#endif
