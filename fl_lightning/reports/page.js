"use strict";
{
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const hidden = new Set();
  const drawn = new Set();

  // All that belongs to a method has its name in every chart.
  const showMethods = () => {
    for (const chart of Bokeh.documents) {
      for (const model of chart.all_models) {
        if (model.name !== null && "visible" in model.properties) {
          model.visible = !hidden.has(model.name);
        }
      }
    }
  };

  const draw = async (place) => {
    if (!drawn.has(place.id)) {
      drawn.add(place.id);
      await Bokeh.embed.embed_item(charts[place.id], place.id);
      showMethods();
    }
  };

  // A chart is drawn when a reader comes near it: a long page opens at once, and a fold has its width by then.
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        watch.unobserve(entry.target);
        draw(entry.target);
      }
    }
  }, { rootMargin: "1000px" });
  document.body.classList.add("live-on");
  for (const place of document.querySelectorAll(".chart")) {
    watch.observe(place);
  }

  for (const box of document.querySelectorAll(".methods input")) {
    box.addEventListener("change", () => {
      for (const same of document.querySelectorAll(".methods input")) {
        if (same.value === box.value) {
          same.checked = box.checked;
        }
      }
      if (box.checked) {
        hidden.delete(box.value);
      } else {
        hidden.add(box.value);
      }
      showMethods();
    });
  }

  // A printed page has all that is folded.
  window.addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details")) {
      fold.open = true;
    }
  });
}
