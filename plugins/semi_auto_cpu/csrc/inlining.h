// Expands what @lazy_inline keeps as calls: cells and the closures that are their gradients.
//
// MindSpore's CPU backend has no way to run them: it refuses a call inside a kernel graph, and a graph without the
// marks of @lazy_inline waits for ever, because then a Receive may run before the forward that feeds its sender.
#ifndef TC3_INLINING_H_
#define TC3_INLINING_H_

#include "ir/func_graph.h"
#include "ir/manager.h"

namespace tc3 {
void InlineCalls(const mindspore::FuncGraphPtr &root, const mindspore::FuncGraphManagerPtr &manager);
// Lets each collective of a graph without Receives wait for the one before it, in the order that all ranks have.
void OrderCollectives(const mindspore::FuncGraphPtr &root, const mindspore::FuncGraphManagerPtr &manager);
}  // namespace tc3
#endif
