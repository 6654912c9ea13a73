"""All rooms stand on this one: errors, owners of parameters, walks over modules and values."""
