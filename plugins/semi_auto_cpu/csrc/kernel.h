// A CPU kernel of any operator, computed by Python.
#ifndef TC3_KERNEL_H_
#define TC3_KERNEL_H_

#include <string>

namespace tc3 {
// From now on Python computes the operator `name` on CPU. Returns whether MindSpore had a kernel of its own.
bool RegisterKernel(const std::string &name);

bool HasKernel(const std::string &name);
}  // namespace tc3
#endif
