"""The other systems that r3 is measured against, each behind the same small interface as r3 itself."""
