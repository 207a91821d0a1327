"""Does the compiler do here what it promises? Properties checked on the user's machine, and the oracle they rest on."""
