// The one way from here into Python.
#ifndef TC3_HOST_H_
#define TC3_HOST_H_

#include <cstddef>
#include <string>

namespace tc3 {
// Args: JSON text, the addresses of input and of output tensors, room for the text of an error. Returns 0 if all is well.
using Callback = int (*)(const char *text, void **inputs, void **outputs, char *error, size_t room);

void SetCallback(Callback callback);

// Calls Python. Throws with Python's own words where it fails.
void CallHost(const std::string &text, void **inputs = nullptr, void **outputs = nullptr);
}  // namespace tc3
#endif
