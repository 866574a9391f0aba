// Some headers of the MindSpore wheel ask for this path, under which the wheel does not ship the file.
#include "utils/log_adapter.h"
