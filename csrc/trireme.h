#pragma once

// Everything a C++ program needs.
#include <trireme/comm/all_mean.h>
#include <trireme/comm/launch.h>
#include <trireme/strategies/ddp/distributed_data_parallel.h>
