"""Array operations of the decoder: normalisation, rotary embedding, attention, convolution, sampling."""
