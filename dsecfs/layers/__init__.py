"""What a layer is: the model, its formats, its sources, publishing and composing."""
