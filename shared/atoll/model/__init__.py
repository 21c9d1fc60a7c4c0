"""A model as the protocol sees it: the layout of its fragments, and pytrees as flat vectors."""
