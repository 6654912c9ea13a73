"""The strategies are tested here on a device whose streams are threads."""
