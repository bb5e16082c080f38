"""VGG16 in Keras 3 on the torch backend, with a batch norm put into each block."""

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
from keras import layers

model = keras.Sequential([layers.Input((64, 64, 3))])
for filters, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
    for _ in range(convolutions):
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
    model.add(layers.BatchNormalization())
    model.add(layers.MaxPooling2D())
model.add(layers.Flatten())
model.add(layers.Dense(4096, activation="relu"))
model.add(layers.Dropout(0.5))
model.add(layers.Dense(4096, activation="relu"))
model.add(layers.Dense(10, activation="softmax"))
model.compile(optimizer=keras.optimizers.Adam(1e-4), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
x, y = np.random.rand(128, 64, 64, 3).astype("float32"), np.random.randint(0, 10, 128)
model.fit(x, y, batch_size=32, epochs=2, validation_split=0.25, verbose=2)
