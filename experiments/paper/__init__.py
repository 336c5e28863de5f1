"""The paper's tables asked on equal terms: designs, peers, scaling, steps; not part of the package."""
