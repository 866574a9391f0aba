// The one way from here into Python.
#ifndef TC3_HOST_H_
#define TC3_HOST_H_

#include <cstddef>
#include <string>

namespace tc3 {
// Gets JSON text, the addresses of inputs and of outputs, and room for the text of an error; returns 0 if all is well.
using Callback = int (*)(const char *text, void **inputs, void **outputs, char *error, size_t room);

void SetCallback(Callback callback);

// Calls Python. Throws with Python's own words where it fails.
void CallHost(const std::string &text, void **inputs = nullptr, void **outputs = nullptr);
}  // namespace tc3
#endif
