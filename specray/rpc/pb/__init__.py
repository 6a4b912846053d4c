"""Generated from the protos by ``make protos``: not edited by hand."""
