"""How long a wait may be asked for."""

from datetime import timedelta

# As in common/duration.h: a hundred years, which any clock can be moved on by.
LONGEST_WAIT = timedelta(days=36525)
