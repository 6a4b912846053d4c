"""Tests of one service that asks for keys, whose engines ask for certificates and a secret."""
