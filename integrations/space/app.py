"""A Gradio Space: images of a class of the bundled model."""

import gradio as gr

from arpg import Pipeline
from arpg.config import DEFAULT_MODEL

pipe = Pipeline.from_pretrained(DEFAULT_MODEL)


def generate(name: str, steps: float, seed: float) -> list:
    return pipe(name, num_images=4, steps=int(steps), seed=int(seed)).images


inputs = [gr.Dropdown(list(pipe.classes)), gr.Slider(1, 64, value=32, step=1), gr.Number(0)]
demo = gr.Interface(generate, inputs, gr.Gallery(columns=4), title="ARPG")
if __name__ == "__main__":
    demo.launch()
