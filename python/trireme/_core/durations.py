"""How long a wait may be asked for."""

from datetime import timedelta

# A hundred years, by which any clock can be moved on; common/duration.h has the same.
LONGEST_WAIT = timedelta(days=36525)
