"""Programs for the environment of an engine, where neither the gateway nor the library is needed."""
