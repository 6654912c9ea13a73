"""What several strategies share is tested here, and the installation itself."""
