"""Tests of freezing, and of what that makes cheaper."""
