"""How each stage makes its artifact: the contract, its one execution, and one file per stage, in pipeline order."""
