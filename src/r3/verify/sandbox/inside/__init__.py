"""The inside of the sandbox: started as a clean interpreter, without the rest of r3."""
