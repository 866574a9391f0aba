// What Python calls, by ctypes. MindSpore itself finds the pass by the exports at the end of front_end.cc.
#include <string>

#include "cluster.h"
#include "host.h"
#include "kernel.h"
#include "replacement.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void tc3_set_callback(tc3::Callback callback) { tc3::SetCallback(callback); }
EXPORT int tc3_register(const char *name) { return tc3::RegisterKernel(name) ? 1 : 0; }
EXPORT const char *tc3_registered() {
  static std::string text;
  text = tc3::RegisteredKernels();
  return text.c_str();
}
EXPORT void tc3_replace(const char *name, int low) { tc3::ReplaceOperator(name, low != 0); }
EXPORT void tc3_register_cluster(unsigned int rank) { tc3::RegisterCluster(rank); }
