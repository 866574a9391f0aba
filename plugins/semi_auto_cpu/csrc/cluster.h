#ifndef TC3_CLUSTER_H_
#define TC3_CLUSTER_H_

#include <cstdint>

namespace tc3 {
// From now on compiles for Ascend ask Python for the sizes of groups, and this is `rank`.
void RegisterCluster(uint32_t rank);
}  // namespace tc3
#endif
