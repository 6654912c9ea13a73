"""Tests of trireme.remote."""
