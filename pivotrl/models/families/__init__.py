"""One file a model family: config and declarative tensor mapping. The registry takes every file here."""
