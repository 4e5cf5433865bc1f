// The names under which Python calls dtypes: of _C.kernels and _C.cuda alike. A name that is unknown throws.
#pragma once

#include <string>

#include "base/dtype.h"

namespace pycomm {

// Any dtype of base/dtype.h.
DType parse_dtype(const std::string& name);

}  // namespace pycomm
