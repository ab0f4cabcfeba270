"""The bundled model, its recipe, and how it was made."""
