"""What runs on the sandbox's inner side: started as a clean interpreter, without the rest of r3."""
