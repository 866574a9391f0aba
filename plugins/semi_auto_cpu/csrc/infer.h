// The shapes and types that a replaced operator gives are those of the original.
#ifndef TC3_INFER_H_
#define TC3_INFER_H_

#include <string>

namespace tc3 {
// Tells MindSpore how to infer the operator `name`, which is the operator `original` under a new name.
void RegisterInfer(const std::string &name, const std::string &original);
}  // namespace tc3
#endif
