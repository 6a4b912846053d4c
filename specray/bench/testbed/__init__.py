"""Services on machines of their own making, to be hurt: Ray nodes as processes or as network namespaces."""
