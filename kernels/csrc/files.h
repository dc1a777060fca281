// Rows in mapped files: the system is asked for them before they are read.
#pragma once

#include "kernel.h"

// Whether the rows of `request` lie in files, and the process has read from its disks since it was
// last asked, in any thread.
bool misses_rows(const hfk_request &request);

// Have the system read the rows that `span` names, without waiting for them. What is in memory is
// passed over; where the system refuses, reading works all the same.
void ask_for_rows(const hfk_request &request, const Span &span);
