#include "host.h"

#include "utils/log_adapter.h"

namespace tc3 {
namespace {
Callback g_callback = nullptr;
}  // namespace

void SetCallback(Callback callback) { g_callback = callback; }

void CallHost(const std::string &text, void **inputs, void **outputs) {
  if (g_callback == nullptr) MS_LOG(EXCEPTION) << "semi_auto_cpu: nothing in Python answers";
  char error[2048] = "";
  if (g_callback(text.c_str(), inputs, outputs, error, sizeof(error)) != 0) MS_LOG(EXCEPTION) << error;
}
}  // namespace tc3
