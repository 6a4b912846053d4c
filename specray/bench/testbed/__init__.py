"""Services to inject faults into, on Ray nodes of their own: processes or network namespaces."""
