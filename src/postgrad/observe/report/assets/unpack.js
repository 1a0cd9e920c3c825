// Blocks of the page: base64 of gzip of JSON, unpacked when they are needed.

/** The JSON value of a block. It may be asked for once where `forget` is set. */
export async function unpack(id, forget = false) {
  const element = document.getElementById(id);
  const text = element.textContent;
  if (forget) element.remove();
  const stream = new Blob([fromBase64(text)]).stream();
  const plain = stream.pipeThrough(new DecompressionStream("gzip"));
  return new Response(plain).json();
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const found = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) found[i] = letters.charCodeAt(i);
  return found;
}
