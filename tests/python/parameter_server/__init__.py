"""Tests of trireme.ps."""
