"""Tests of whole services, over real Ray."""
