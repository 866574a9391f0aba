// What Python is told about tensors and values: JSON, so that nothing has to be guessed or evaluated there.
#ifndef TC3_TEXT_H_
#define TC3_TEXT_H_

#include <string>
#include <vector>

#include "ir/primitive.h"
#include "kernel/cpu/cpu_kernel.h"

namespace tc3 {
// The prefix of attributes that are this library's own: Python does not see them.
constexpr char kPrivate[] = "tc3_";

// "..." with everything escaped that JSON wants escaped.
std::string Quoted(const std::string &text);

// A constant: null, true, numbers (floats with all their digits), "text", nested lists. Throws at anything else, and at
// a value that is not known yet: a kernel must not take it for a constant.
std::string ValueText(const mindspore::ValuePtr &value);

// {"name": "value", ...}: the attributes of an operator, each as MindSpore prints it.
std::string AttributesText(const mindspore::PrimitivePtr &primitive);

// [{"type": "Float32", "bytes": 32, "shape": [2, 4]}, {"value": 3}, ...]
std::string TensorsText(const std::vector<mindspore::kernel::KernelTensor *> &tensors);
}  // namespace tc3
#endif
