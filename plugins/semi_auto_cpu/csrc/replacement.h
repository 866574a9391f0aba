// An operator that Python computes instead of MindSpore is renamed in the graph: <name> becomes TC3_<name>.
//
// A new name, because MindSpore remembers which types a name's CPU kernel takes at its first use, and because its
// kernels and type checks of the old name no longer apply. Only tensors stay inputs; constants become an attribute,
// because a CPU kernel takes none.
#ifndef TC3_REPLACEMENT_H_
#define TC3_REPLACEMENT_H_

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "abstract/abstract_value.h"
#include "ir/anf.h"
#include "ir/primitive.h"

namespace tc3 {
constexpr char kPrefix[] = "TC3_";
constexpr char kArguments[] = "tc3_arguments";  // the attribute that holds them as JSON, for the kernel

// Python computes the operator `name` from now on, in every graph that is compiled; `low`: where it has 16-bit floating
// point tensors only.
void ReplaceOperator(const std::string &name, bool low);
bool IsReplaced(const mindspore::CNodePtr &cnode);

// The types of a node's tensors: of its inputs, and of those in tuples.
std::set<mindspore::TypeId> InputTypes(const mindspore::CNodePtr &cnode);

// The call `cnode` of a replaced operator as one of its new name.
mindspore::CNodePtr Replaced(const mindspore::CNodePtr &cnode);

// Whether a call that is replaced for its 16-bit tensors takes numbers that are known only when the step runs. Python,
// which gets constants only, cannot compute it; MindSpore can in float32.
bool TakesUnknownNumbers(const mindspore::CNodePtr &cnode);

// The call with its 16-bit tensors widened to float32, and its result rounded.
mindspore::CNodePtr Widened(const mindspore::CNodePtr &cnode);

// <name> of TC3_<name>, and any other name itself.
std::string OriginalName(const std::string &name);

// The original operator and all its arguments, for a new one and the tensors that it was given.
// `by_value`: the arguments whose values the original's infer asks for.
std::pair<mindspore::PrimitivePtr, mindspore::abstract::AbstractBasePtrList> OriginalCall(
  const mindspore::PrimitivePtr &host, const mindspore::abstract::AbstractBasePtrList &tensors,
  const std::set<int64_t> &by_value);
}  // namespace tc3
#endif
