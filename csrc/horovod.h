#pragma once

// Horovod's API for C++ programs: namespace hvd = trireme::horovod.
#include <trireme/strategies/horovod/adasum.h>
#include <trireme/strategies/horovod/distributed_optimizer.h>
#include <trireme/strategies/horovod/session.h>
