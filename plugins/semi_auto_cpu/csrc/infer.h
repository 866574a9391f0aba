// The shapes and types that a replaced operator gives are those of the original.
#ifndef TC3_INFER_H_
#define TC3_INFER_H_

#include <string>

namespace tc3 {
// Tells MindSpore how to infer the operator of the new name `name`.
void RegisterInfer(const std::string &name);
}  // namespace tc3
#endif
