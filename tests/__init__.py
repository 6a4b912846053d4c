"""Tests of specray, laid out like the package."""
